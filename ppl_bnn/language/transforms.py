"""Functions from model to model: the same program under an effect handler, for any method in either system.

The result is a model like any other: it keeps the name, the documentation and the bound arguments of the input model,
it can be sent to another process, and it can be transformed again.

- `with_precision_factors`: the model with tuned hyper-parameters.
- `with_prior_scales`: the model with `EmpiricalBayes` priors at the scales that a method found.
- `noncentred`: the same joint distribution of the data and the weights, in coordinates in which the prior is standard.
- `with_prior`: an earlier posterior as the prior.
- `student_of`: the same network with a predictive that can be wider, for distillation.
"""

from __future__ import annotations

import functools
import math
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from ppl_bnn.core.errors import InputError, ModelError, UnsupportedError
from ppl_bnn.language import ops
from ppl_bnn.language.distributions import ON_POSITIVES, ON_REALS, Distribution, draw_shape, one_minus_exp
from ppl_bnn.language.layers.basic import dense
from ppl_bnn.language.likelihoods import Gaussian, HeteroscedasticGaussian, Laplace, MixtureDensity, StudentT
from ppl_bnn.language.likelihoods.base import parts
from ppl_bnn.language.primitives import Handler, Message, NamedHandler, deterministic

Model = Callable[..., Any]
# Site -> a positive number, or an array.
Positive = Mapping[str, float | np.ndarray]
# (distribution of a site, value of the site) -> its new distribution.
Rescaling = Callable[[Distribution, Any], Distribution]


def _transformed(model: Model, handler: Callable[[], Handler]) -> Model:
    """`model` with a new handler around each run; bound arguments stay bound outside of it."""
    if isinstance(model, functools.partial):
        return functools.partial(_transformed(model.func, handler), *model.args, **model.keywords)

    @functools.wraps(model)
    def transformed(*arguments: Any, **keywords: Any) -> Any:
        with handler():
            return model(*arguments, **keywords)

    if not hasattr(model, "__name__"):
        transformed.__name__ = transformed.__qualname__ = type(model).__name__
    return transformed


class _NamedSites(NamedHandler):
    """A handler that changes named sites, and raises if a run has no such site."""

    sees_maps = False

    def __init__(self, transform: str, names: Iterable[str]):
        super().__init__(f"site of {transform}", sorted(names))
        self.transform = transform

    def process(self, msg: Message) -> None:
        if msg.kind not in ("sample", "param"):
            return
        self.met.append(msg.name)
        if msg.name not in self.names:
            return
        good = msg.kind == "sample" and msg.arguments["obs"] is None
        got = "a parameter without a prior" if msg.kind == "param" else "an observation"
        expected = f"a random variable at site {msg.name!r}"
        ModelError.check(good, self.transform, expected, got, "leaving that site out")
        msg.arguments["distribution"] = self.changed(msg, msg.arguments["distribution"])

    def changed(self, msg: Message, specification: Distribution) -> Distribution:
        """The distribution of a named site in place of `specification`."""
        raise NotImplementedError

    # What the errors of the two checks suggest.
    family_advice, shape_advice = "leaving that site out", "the shape of the site"

    def check_family(self, good: bool, name: str, expected: str, specification: Distribution) -> None:
        """Raise UnsupportedError for another family than `expected` at a site."""
        expected = f"{expected} at site {name!r}"
        UnsupportedError.check(good, self.transform, expected, specification.family, self.family_advice)

    def check_shape(self, good: bool, name: str, expected: str, given: Any) -> None:
        """Raise InputError for an array whose shape does not fit the site."""
        where = f"{self.transform}, site {name!r}"
        InputError.check(good, where, expected, f"shape {np.shape(given)}", self.shape_advice)


class _ScaledPriors(_NamedSites):
    """Priors of one family with other scales: site -> value, and (distribution, value) -> distribution."""

    def __init__(self, transform: str, values: Mapping[str, Any], family: str, rescaled: Rescaling):
        super().__init__(transform, values)
        self.values, self.family, self.rescaled = values, family, rescaled

    def changed(self, msg: Message, specification: Distribution) -> Distribution:
        value, shape = self.values[msg.name], draw_shape(specification)
        good = specification.family == self.family
        self.check_family(good, msg.name, f"the prior {self.family}", specification)
        units = self.family == "EmpiricalBayes"
        known = f"one number, numbers of shape {shape[-1:]}, or" if units else "one number, or numbers"
        fits = np.shape(value) in ((), shape, shape[-1:] if units else shape)
        self.check_shape(fits, msg.name, f"{known} of shape {shape}", value)
        return self.rescaled(specification, value)


def _positive(transform: str, what: str, values: Mapping[str, Any]) -> Positive:
    """Site -> the number or the array, after a check that it holds positive numbers only."""
    found: dict[str, float | np.ndarray] = {}
    for name, value in values.items():
        array = np.asarray(value)
        good = array.dtype.kind in "fiu" and array.size and np.all(np.isfinite(array) & (array > 0))
        where = f"{transform}, site {name!r}"
        InputError.check(good, where, f"positive {what}s", repr(value), f"a {what} of 1.0")
        # A number stays a number, so that the system can keep the distribution from run to run. Of an array a copy in
        # C order, because torch does not share read-only arrays, such as those from JAX.
        found[name] = float(array) if array.ndim == 0 else np.array(array, dtype=float, order="C")
    return found


# --- tuned hyper-parameters -----------------------------------------------------------------------


class _PrecisionFactors(_ScaledPriors):
    def __init__(self, roots: Mapping[str, Any], likelihood: Gaussian | None):
        super().__init__("with_precision_factors", roots, "Normal", _divided_scale)
        self.likelihood = likelihood

    def process(self, msg: Message) -> None:
        super().process(msg)
        if msg.kind == "observe" and self.likelihood is not None:
            given = msg.arguments["likelihood"]
            good = isinstance(given, Gaussian) and isinstance(given.noise, int | float)
            random = "Gaussian with a noise that is a random variable or an array"
            got = random if isinstance(given, Gaussian) else type(given).__name__
            expected = "the likelihood Gaussian(noise) with a plain number as noise"
            UnsupportedError.check(good, self.transform, expected, got, "noise=None")
            msg.arguments["likelihood"] = self.likelihood


def _divided_scale(specification: Distribution, root: Any) -> Distribution:
    scale = specification.arguments["scale"]
    if isinstance(scale, list | tuple):
        scale = np.asarray(scale, dtype=float)
    if not isinstance(scale, int | float):
        root = ops.asarray(root, like=scale)
    return replace(specification, arguments={**specification.arguments, "scale": scale / root})


def with_precision_factors(model: Model, factors: Positive, noise: float | None = None) -> Model:
    """Multiply the precisions of Normal priors, so that w ~ N(loc, scale^2 / factor) at each named site.

    A Laplace approximation with tuned hyper-parameters approximates the posterior of this model. `factors` are site ->
    a positive number, or an array of the shape of the site; `noise` replaces the known noise of `Gaussian(number)`.

    Raises InputError for factors or a noise that are not positive or do not fit their site. When the model runs, an
    unknown site raises UnknownNameError, a parameter or an observation ModelError, a prior other than Normal, or a
    likelihood without a known noise, UnsupportedError.
    """
    number = noise is None or (isinstance(noise, int | float) and not isinstance(noise, bool))
    InputError.check(number, "with_precision_factors", "a number as noise", repr(noise), "noise=1.0")
    positive = _positive("with_precision_factors", "factor", factors)
    roots = {name: ops.sqrt(factor) for name, factor in positive.items()}
    likelihood = None if noise is None else Gaussian(float(noise))
    return _transformed(model, functools.partial(_PrecisionFactors, roots, likelihood))


# --- scales that a method found -------------------------------------------------------------------


def _normal(specification: Distribution, scale: Any) -> Distribution:
    arguments = {"loc": 0.0, "scale": scale}
    return Distribution("Normal", arguments, draw_shape(specification), specification.event_dims)


def with_prior_scales(model: Model, scales: Positive) -> Model:
    """Replace `priors.EmpiricalBayes` by w ~ N(0, scale^2), with the scales that a method found.

    A variational posterior under that prior approximates the posterior of this model. `scales` are site -> a positive
    number, an array (O,) with one scale per output unit, or one of the shape of the site; other sites keep their prior.

    Raises InputError for scales that are not positive or do not fit their site. When the model runs, an unknown site
    raises UnknownNameError, a parameter or an observation ModelError, another prior UnsupportedError.
    """
    name, family = "with_prior_scales", "EmpiricalBayes"
    positive = _positive(name, "scale", scales)
    return _transformed(model, functools.partial(_ScaledPriors, name, positive, family, _normal))


# --- other coordinates ----------------------------------------------------------------------------

LOCATION_SCALE = ("Normal", "StudentT", "Laplace", "Cauchy")


class _Drawn(np.ndarray):
    """A single drawn number in NumPy, kept as an array so that values computed from it are recognised."""


class _NonCentred(_NamedSites):
    def __init__(self, names: Iterable[str], everywhere: bool):
        super().__init__("noncentred", names)
        self.everywhere = everywhere
        # Base site -> the site that it replaces, with its location and scale.
        self.moved: dict[str, tuple[str, Any, Any]] = {}

    def process(self, msg: Message) -> None:
        super().process(msg)
        if self.everywhere and msg.kind == "sample" and msg.arguments["obs"] is None:
            specification = msg.arguments["distribution"]
            given = (specification.arguments.get(name, 0.0) for name in ("loc", "scale"))
            fixed = all(isinstance(each, int | float | np.generic | list | tuple) for each in given)
            if specification.family in LOCATION_SCALE and not fixed:
                msg.arguments["distribution"] = self.changed(msg, specification)

    def changed(self, msg: Message, specification: Distribution) -> Distribution:
        expected = f"a prior among {', '.join(LOCATION_SCALE)}"
        self.check_family(specification.family in LOCATION_SCALE, msg.name, expected, specification)
        arguments, shape = specification.arguments, draw_shape(specification) or specification.shape
        base = f"{msg.name}.base"
        self.moved[base] = (msg.name, arguments["loc"], arguments["scale"])
        standard = {**arguments, "loc": 0.0, "scale": 1.0}
        # Handlers below sample the base site; `after` replaces its value by that of the site.
        msg.name = base
        return replace(specification, arguments=standard, shape=shape)

    def after(self, msg: Message) -> None:
        if msg.kind == "sample" and msg.name in self.moved:
            msg.name, loc, scale = self.moved.pop(msg.name)
            loc, scale = (_beside(value, msg.value) for value in (loc, scale))
            msg.value = deterministic(msg.name, loc + scale * msg.value)
        number = isinstance(msg.value, int | float | np.generic | np.ndarray) and np.ndim(msg.value) == 0
        if number and msg.kind in ("sample", "param"):
            msg.value = np.asarray(msg.value).view(_Drawn)


def _beside(value: Any, array: Any) -> Any:
    """A number unchanged; a list or a NumPy array in the library of `array`."""
    return value if isinstance(value, int | float) else ops.asarray(value, like=array)


def noncentred(model: Model, sites: Iterable[str] | None = None) -> Model:
    """Rewrite the model in non-centred form: w = loc + scale * e, with e from the standard member of the family of w.

    The latent site is `<name>.base`; w is recorded under its own name as a deterministic site. The joint distribution
    of all sites and the data is unchanged; the coordinates of samplers and approximations change. Where the data say
    little about w, the funnel of a hierarchical prior disappears (Papaspiliopoulos, Roberts and Skold 2007), and the
    density is bounded at a scale of zero.

    Parameters
    ----------
    model : callable
        A model in the language.
    sites : iterable of str, optional
        The names to change; by default every Normal, Student-t, Laplace and Cauchy site whose location or scale is an
        array and not a plain number, as in every site that depends on another.

    Returns
    -------
    callable
        The transformed model.

    Raises
    ------
    InputError
        `sites` is a single string.
    UnknownNameError
        When the model runs: there is no such random variable.
    ModelError
        When the model runs: a site called `<name>.base` exists already, or a site is a parameter without a prior or an
        observation.
    UnsupportedError
        When the model runs: another family.

    References
    ----------
    Papaspiliopoulos, Roberts and Skold (2007), A general framework for the parametrization of hierarchical models.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     scale = bnn.sample("scale", bnn.dist.HalfNormal(1.0))
    ...     bnn.observe(y, bnn.mlp(x, [1], prior=bnn.priors.Normal(0.0, scale)), bnn.likelihoods.Gaussian(1.0))
    >>> [site.name for site in bnn.zoo.sketch(bnn.noncentred(model), 4).sites]
    ['scale', 'output.weight.base', 'output.bias.base']
    """
    good = not isinstance(sites, str)
    InputError.check(good, "noncentred", "a list of sites", repr(sites), f"sites=[{sites!r}]")
    names = frozenset(sites or ())
    return _transformed(model, functools.partial(_NonCentred, names, sites is None))


# --- an earlier posterior as the prior ------------------------------------------------------------


@dataclass(frozen=True)
class GaussianPrior:
    """A Gaussian over sites in unconstrained coordinates. Posteriors provide it and `with_prior` takes it.

    The spread of each site is in exactly one of `scale`, `joint` and `kronecker`.

    Parameters
    ----------
    mode : mapping of str to ndarray
        Site -> its mean, sites in the order of the program.
    scale : mapping of str to ndarray
        Site -> standard deviations, independent coordinates.
    joint : tuple
        Pairs (sites in the order of the program, precision (p, p) of their flat vector).
    kronecker : mapping of str to tuple
        Site -> (left_vectors (I, I), right_vectors (O, O), precisions (I, O)), see `KroneckerNormal`.

    Raises
    ------
    InputError
        A shape that does not fit, a spread that is not positive, or a site with no spread or with several.
    """

    mode: Mapping[str, np.ndarray]
    scale: Mapping[str, np.ndarray] = field(default_factory=dict)
    joint: tuple[tuple[tuple[str, ...], np.ndarray], ...] = ()
    kronecker: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Copies, because torch refuses to share read-only arrays, such as those from JAX.
        def copy(value: Any) -> np.ndarray:
            return np.array(value, dtype=float, order="C")

        def check(good: Any, expected: str, got: str) -> None:
            InputError.check(good, "GaussianPrior", expected, got, "as_prior() of a fitted approximation")

        vars(self).update(
            mode={name: copy(value) for name, value in self.mode.items()},
            scale={name: copy(value) for name, value in self.scale.items()},
            joint=tuple((tuple(names), copy(precision)) for names, precision in self.joint),
            kronecker={name: tuple(map(copy, parts)) for name, parts in self.kronecker.items()},
        )
        spread = sorted([*self.scale, *(name for names, _ in self.joint for name in names), *self.kronecker])
        sites = sorted(self.mode)
        check(spread == sites, "one spread for each site of the mode", f"{spread} for {sites}")
        for name, value in self.mode.items():
            check(np.all(np.isfinite(value)), f"a finite mode of site {name!r}", "NaN or infinity")
        for name, scale in self.scale.items():
            shape = self.mode[name].shape
            good = scale.shape == shape and np.all((scale > 0) & np.isfinite(scale))
            got = f"shape {scale.shape}, smallest {scale.min(initial=math.inf):.3g}"
            check(good, f"positive standard deviations of shape {shape} for site {name!r}", got)
        for names, precision in self.joint:
            shape = (sum(self.mode[name].size for name in names),) * 2
            good = precision.shape == shape and np.allclose(precision, precision.T)
            got = f"shape {precision.shape}" + (", not symmetric" if precision.shape == shape else "")
            check(good, f"a symmetric precision of shape {shape} for sites {names}", got)
        for name, (left, right, precisions) in self.kronecker.items():
            shape = precisions.shape
            good = len(shape) == 2 and precisions.size == self.mode[name].size
            good = good and left.shape == shape[:1] * 2 and right.shape == shape[1:] * 2
            expected = f"left_vectors (I, I), right_vectors (O, O) and precisions (I, O) for site {name!r}"
            check(good, expected, f"shapes {left.shape}, {right.shape} and {shape}")
            good = np.all((precisions > 0) & np.isfinite(precisions))
            check(good, f"positive precisions for site {name!r}", f"{precisions.min():.3g}")


class _Conditional(NamedTuple):
    """One site of a joint Gaussian given those before it: N(mode + slope (deviations of `before`), C C'), flat."""

    mode: np.ndarray
    before: tuple[str, ...]
    slope: np.ndarray
    scale_tril: np.ndarray


def _conditionals(prior: GaussianPrior) -> dict[str, _Conditional]:
    """The factors p(u_k | u_1 ... u_k-1) of each joint Gaussian.

    With A = R' R, R lower triangular, R (u - mode) is standard normal, so that block k has the conditional precision
    R_kk' R_kk and the conditional mean mode_k - R_kk^-1 sum_{j<k} R_kj (u_j - mode_j).
    """
    from scipy.linalg import cholesky, solve_triangular

    found = {}
    for names, precision in prior.joint:
        try:
            # The Cholesky factor of the matrix in reversed order, reversed again, is R'.
            root = cholesky(precision[::-1, ::-1], lower=True)[::-1, ::-1].T
        except np.linalg.LinAlgError:
            expected = f"a positive definite precision for sites {names}"
            got, advice = "an indefinite or singular one", "a posterior with a proper Gaussian"
            raise InputError.of("with_prior", expected, got, advice) from None
        start = 0
        for index, name in enumerate(names):
            stop = start + prior.mode[name].size
            inverse = solve_triangular(root[start:stop, start:stop], np.eye(stop - start), lower=True)
            slope = -inverse @ root[start:stop, :start]
            # A copy in C order, with exact zeros above the diagonal.
            found[name] = _Conditional(prior.mode[name], names[:index], slope, np.tril(inverse).copy())
            start = stop
    return found


class _Lazy(UserDict[str, Any]):
    """Arguments of a distribution; a function is called for the value: a network function never asks for one."""

    def __getitem__(self, name: str) -> Any:
        given = self.data[name]
        return given() if callable(given) else given


class _WithPrior(_NamedSites):
    family_advice = "a prior with one of these supports, on a transformed variable"
    shape_advice = "a posterior of this model"

    def __init__(self, prior: GaussianPrior, conditionals: Mapping[str, _Conditional]):
        super().__init__("with_prior", prior.mode)
        self.prior = prior
        self.conditionals = conditionals
        self.deviations: dict[str, Callable[[], Any]] = {}

    def changed(self, msg: Message, specification: Distribution) -> Distribution:
        name, shape, positive = msg.name, draw_shape(specification), _is_positive(specification)
        mode = self.prior.mode[name]
        known = positive or specification.family in ON_REALS
        self.check_family(known, name, "a prior on the real line or on the positive numbers", specification)
        self.check_shape(mode.shape == shape, name, f"a posterior over shape {shape}", mode)
        if name in self.prior.kronecker:
            expected = f"a site on the real line for a Kronecker-factored Gaussian, as {name!r}"
            advice, got = "a full or diagonal structure", specification.family
            UnsupportedError.check(not positive, self.transform, expected, got, advice)
            left, right, precisions = self.prior.kronecker[name]
            arguments = {"loc": mode, "left_vectors": left, "right_vectors": right, "precisions": precisions}
            return Distribution("KroneckerNormal", arguments)
        loc: Any = mode
        if name in self.prior.scale:
            scale = self.prior.scale[name]
        else:
            conditional = self.conditionals[name]
            for earlier in conditional.before:
                expected = f"site {earlier!r} before site {name!r}, as in the program of the posterior"
                good, advice = earlier in self.deviations, "the model of the posterior"
                ModelError.check(good, self.transform, expected, "the other order", advice)
            loc = self._loc(conditional)
            if mode.size > 1:
                family = "MultivariateLogNormal" if positive else "MultivariateNormal"
                return Distribution(family, _Lazy(loc=loc, scale_tril=conditional.scale_tril))
            scale = conditional.scale_tril.reshape(mode.shape)
        # The event of a site keeps its axes; that of a multivariate family covers them all.
        multivariate = specification.family.startswith(("Multi", "Kron"))
        events = scale.ndim if multivariate else specification.event_dims
        family = "LogNormal" if positive else "Normal"
        return Distribution(family, _Lazy(loc=loc, scale=scale), None, events)

    def _loc(self, conditional: _Conditional) -> Any:
        if not conditional.before:
            return conditional.mode
        parts = [self.deviations[name] for name in conditional.before]

        @functools.cache
        def loc() -> Any:
            deviation = ops.concatenate([part() for part in parts])
            shift = ops.asarray(conditional.slope, like=deviation) @ deviation
            return ops.asarray(conditional.mode, like=deviation) + shift.reshape(conditional.mode.shape)

        return loc

    def after(self, msg: Message) -> None:
        if msg.kind == "sample" and msg.name in self.conditionals:
            value, mode = msg.value, self.prior.mode[msg.name]
            positive = _is_positive(msg.arguments["distribution"])

            def deviation() -> Any:
                u = ops.log(value) if positive else value
                return (u - ops.asarray(mode, like=u)).reshape(-1)

            self.deviations[msg.name] = deviation


def _is_positive(specification: Distribution) -> bool:
    return specification.family in ON_POSITIVES


def with_prior(model: Model, prior: Any) -> Model:
    """Use an earlier posterior as the prior, for data that arrive in parts.

    p(w | D1, D2) is proportional to p(D2 | w) p(w | D1): fitted to D2, this model has the posterior of all rows,
    exactly where p(w | D1) is Gaussian, else up to the error of its approximation (Opper 1998).

    Parameters
    ----------
    model : callable
        A model in the language.
    prior : Posterior or GaussianPrior
        A posterior whose approximation is Gaussian in unconstrained coordinates (Laplace, mean-field SVI), or a
        `GaussianPrior`. Its sites get that Gaussian, each conditional on the earlier ones, and transformed to the
        support of the site: unchanged on the real line, through exp on the positive numbers. Other sites keep their
        prior.

    Returns
    -------
    callable
        The transformed model.

    Raises
    ------
    UnsupportedError
        The approximation is not Gaussian, the posterior was fitted in standardised units, or a site has another
        support.
    InputError
        When the model runs: a site has another shape.
    ModelError
        When the model runs: the sites are in another order.
    UnknownNameError
        When the model runs: the model does not have a site.

    References
    ----------
    Opper (1998), A Bayesian approach to on-line learning.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table, model = bnn.data.load("diabetes"), bnn.zoo.load("linear_regression")
    >>> x, y = table.x / 0.05, table.y / 77.0
    >>> first = bnn.fit(model, x[:200], y[:200], bnn.Laplace())
    >>> both = bnn.fit(bnn.with_prior(model, first), x[200:], y[200:], bnn.Laplace())
    >>> spread = [posterior.draws["output.weight"].std((0, 1)).mean() for posterior in (first, both)]
    >>> bool(spread[1] < spread[0])
    True
    """
    if not isinstance(prior, GaussianPrior):
        check, where = UnsupportedError.check, "with_prior"
        as_prior: Any = getattr(getattr(prior, "approximation", None), "as_prior", None)
        got = type(getattr(prior, "approximation", prior)).__name__
        expected = "a posterior whose approximation is a Gaussian"
        check(as_prior, where, expected, got, "a posterior by Laplace or SVI")
        expected, got = "a posterior in the units of the data", "one fitted with standardise=True"
        advice = "standardising all data alike beforehand"
        check(prior.standardisation is None, where, expected, got, advice)
        prior = as_prior()
    return _transformed(model, functools.partial(_WithPrior, prior, _conditionals(prior)))


# --- a student ------------------------------------------------------------------------------------

# Normals for each one of the likelihood, and hidden units of the layer that is added.
COPIES, SHIFT_WIDTH = 3, 20


class _Student(Handler):
    """More outputs at the end of a network, as a function of its features, and a wider likelihood of them."""

    sees_maps = False

    def __init__(self) -> None:
        self.features: list[Any] = []

    def process(self, msg: Message) -> None:
        if msg.kind == "linear" and len(msg.arguments["x"].shape) == 2:
            # The inputs of the first map and of the last.
            self.features = [*self.features[:1], msg.arguments["x"]]
        elif msg.kind == "observe":
            base, likelihood = _wider(msg.arguments["f"], msg.arguments["likelihood"])
            features = ops.concatenate(self.features or [base])
            hidden = ops.tanh(dense("student.hidden", features, SHIFT_WIDTH))
            shift = dense("student.output", hidden, int(base.shape[-1]))
            msg.arguments |= {"f": base + shift, "likelihood": likelihood}


def _wider(f: Any, likelihood: Any) -> tuple[Any, Any]:
    """Outputs (N, K') and a likelihood of them, which has this predictive and, of real numbers, wider ones."""
    if isinstance(likelihood, MixtureDensity):
        components = parts(f, 3)
    elif isinstance(likelihood, HeteroscedasticGaussian):
        loc, scale = parts(f, 2)
        components = [ops.zeros_like(loc), loc, scale]
    elif isinstance(likelihood, Gaussian | StudentT | Laplace):
        scale = ops.ones_like(f) * getattr(likelihood, likelihood.positive[0])
        # The inverse of softplus.
        components = [ops.zeros_like(f), f, scale + ops.log(one_minus_exp(scale))]
    else:
        return f, likelihood
    if len(likelihood.target_shape(tuple(f.shape))) > 1:
        return ops.concatenate(components[1:]), HeteroscedasticGaussian()
    return ops.concatenate([part for part in components for _ in range(COPIES)]), MixtureDensity()


def student_of(model: Model) -> Model:
    """Make the student of a posterior from its model: the same network, with an end that can say what a posterior says.

    To its outputs are added those of a layer of 20 tanh units, whose inputs are the inputs of the first and of the last
    linear map: a mean over many networks is seldom one of them. Real numbers get a predictive that can be wider than
    the noise, row by row: one number a mixture of normals, three for each of the likelihood, and several numbers
    independent normals. Classes and counts keep their likelihood.

    Parameters
    ----------
    model : callable
        A model in the language.

    Returns
    -------
    callable
        The transformed model, which `Posterior.distil` fits by default and `bnn.load` needs for what it has fitted.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> model = bnn.zoo.load("regression_mlp", width=5)
    >>> bnn.zoo.sketch(model, 4).parameters, bnn.zoo.sketch(bnn.student_of(model), 4).parameters
    (32, 421)
    """
    return _transformed(model, _Student)
