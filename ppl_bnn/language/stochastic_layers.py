"""Randomness in linear maps: gradient estimators for factorised weights, and dropout.

If all rows of a batch share one draw of the weights, their log likelihoods are correlated, and averaging over rows does
not average that noise away. `LocalReparameterisation` and `Flipout` give every row a draw of its own: the outputs of
each row have their distribution under q, and the rows are independent or uncorrelated. The estimate of sum_n E_q[log
p(y_n | x_n, w)] and its gradient keep their mean and have less variance. `DroppedInputs` is dropout.

All three are handlers of the primitives `linear` and `conv`, for any model, inside the interpretation of a system:

    with LocalReparameterisation(loc, scale, normal):
        model(x, y)

A handler serves one run. Random numbers come from functions for NumPy, torch and JAX alike: normal(shape, like) returns
standard normals, sign(shape, like) numbers -1 and 1 with equal probability, keep(shape, like, probability) ones with
that probability and zeros, all as arrays like `like`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple

from ppl_bnn.core.errors import UnsupportedError
from ppl_bnn.language import ops
from ppl_bnn.language.distributions import ON_REALS
from ppl_bnn.language.handlers import NetworkFunction, RecordLinear, RecordMessages, Values, used_elsewhere
from ppl_bnn.language.primitives import Message, NamedHandler, apply_map

Array = Any
Model = Callable[..., Any]
# (shape, like) -> random numbers of that shape, an array of the kind of `like`.
Source = Callable[[tuple[int, ...], Array], Array]
# (shape, like, probability) -> ones and zeros.
KeepSource = Callable[[tuple[int, ...], Array, float], Array]
# The map of (inputs, weight), without the bias.
Map = Callable[[Array, Array], Array]
# The sites of a weight and of a bias.
Sites = tuple[str | None, str | None]


# --- one draw of the weights for each row -----------------------------------------------------------


class _PerRow(NamedHandler):
    """A handler that gives the linear maps of some sites another draw in each row.

    A weight or a bias is a site if it is the very array with which the site was answered. Anything else is used
    unchanged: arrays computed from sites, a site with a constrained support, a bias that is not (O,) for O outputs, and
    a weight that is not a matrix. `refuse_shared` has refused sites that the estimator does not serve.
    """

    estimator = ""

    def __init__(self, loc: Values):
        super().__init__(f"site of {self.estimator}", loc)
        self.loc = loc
        # The arrays are kept, because Python reuses the `id` of an array that was deleted.
        self.sites: dict[int, tuple[str, Array]] = {}

    def process(self, msg: Message) -> None:
        if msg.kind not in ("linear", "conv"):
            return
        x, weight, bias = (msg.arguments[name] for name in ("x", "weight", "bias"))
        axes = len(x.shape) if msg.kind == "conv" else 2
        weight_site = self._site(weight) if len(weight.shape) == axes else None
        whole = bias is not None and tuple(bias.shape) == tuple(weight.shape[-1:])
        bias_site = self._site(bias) if whole else None
        if weight_site is not None or bias_site is not None:
            applied = functools.partial(apply_map, msg)
            msg.answer(self._output(applied, x, weight, bias, (weight_site, bias_site)))

    def after(self, msg: Message) -> None:
        if msg.kind != "sample":
            return
        self.met.append(msg.name)
        free = msg.arguments["obs"] is None and msg.arguments["distribution"].family in ON_REALS
        if msg.name in self.loc and free:
            self.sites[id(msg.value)] = (msg.name, msg.value)

    def _site(self, value: Array) -> str | None:
        return self.sites.get(id(value), (None,))[0]

    def _output(self, applied: Map, x: Array, weight: Array, bias: Any, sites: Sites) -> Array:
        """The output of the map. A site is None where the given value is to be used unchanged."""
        raise NotImplementedError

    def _mean(self, applied: Map, x: Array, weight: Array, bias: Any, sites: Sites) -> Array:
        """The output at the means of the sites."""
        of_weight, of_bias = (
            given if site is None else self.loc[site]
            for given, site in zip((weight, bias), sites, strict=True)
        )
        return applied(x, of_weight) if bias is None else applied(x, of_weight) + of_bias


def _root(variance: Array) -> Array:
    """The square root, with derivative zero at zero.

    The root of sum_i x_i^2 sigma_i^2 has no derivative at x = 0. Zero is one of its subgradients, and the mean over a
    symmetric noise is zero for any of them.
    """
    positive = variance > 0
    root = ops.sqrt(ops.where(positive, variance, ops.ones_like(variance)))
    return ops.where(positive, root, ops.zeros_like(root))


def _one_per_row(x: Array, width: int) -> tuple[int, ...]:
    """(N, 1, ..., 1, width): one number per row of x (N, ..., I) and unit, the same at all positions."""
    return (int(x.shape[0]), *(1,) * (len(x.shape) - 2), width)


class LocalReparameterisation(_PerRow):
    """Sample the outputs of linear maps for each row instead of the weights (Kingma, Salimans and Welling 2015).

    For w_io ~ N(mu_io, sigma_io^2) and b_o ~ N(mu_o, sigma_o^2), all independent, the outputs of a row x are
    independent normals, with a new eps for every row and output:

        y_o = sum_i x_i mu_io + mu_o + (sum_i x_i^2 sigma_io^2 + sigma_o^2)^(1/2) eps_o.

    Where only the weight or only the bias is a site of `loc`, the other keeps its value; a bias alone is drawn once per
    row, the same at all positions. `loc` and `scale` are site -> means and standard deviations of independent normals;
    `normal` is a source of standard normals.

    Notes
    -----
    The distribution of each row is exact for a site that is used once per row. A second use in the same row
    (another position of a convolution or of an x with more than two axes, or another map) would need the same weights,
    but gets a new eps. `refuse_shared` refuses such sites, unless `approximate`: then every position of every use has
    new noise, as is usual for convolutions (Molchanov et al. 2017; Shridhar et al. 2019). Means and variances of the
    outputs are then correct, their dependence within a row is lost, and the objective is no longer a bound on the
    evidence.

    A use of the array outside of linear maps (in a product, in another prior, through a function of it) gets the
    sampled value, and so another draw; the handler cannot see it, but `shared_weights` finds it beforehand. A use in
    the prior of another site is not a use in the network, because the complexity cost is a separate term. Rows that are
    permuted or mixed without `bnn.coupled` cannot be detected.

    References
    ----------
    Kingma, Salimans and Welling (2015), Variational dropout and the local reparameterization trick.

    Molchanov, Ashukha and Vetrov (2017), Variational dropout sparsifies deep neural networks.

    Shridhar et al. (2019).
    """

    estimator = "local reparameterisation"

    def __init__(self, loc: Values, scale: Values, normal: Source):
        super().__init__(loc)
        self.scale = scale
        self.normal = normal

    def _output(self, applied: Map, x: Array, weight: Array, bias: Any, sites: Sites) -> Array:
        weight_site, bias_site = sites
        result = self._mean(applied, x, weight, bias, sites)
        if weight_site is None:
            assert bias_site is not None
            scale = self.scale[bias_site]
            return result + scale * self.normal(_one_per_row(x, int(scale.shape[-1])), result)
        variance = applied(x * x, self.scale[weight_site] ** 2)
        if bias_site is not None:
            variance = variance + self.scale[bias_site] ** 2
        return result + _root(variance) * self.normal(tuple(result.shape), result)


class Flipout(_PerRow):
    """Share one deviation of the weights among all rows, with random signs in each (Wen et al. 2018).

    With w = mu + dw, the dw independent of each other and symmetric about 0, and signs r (N, I) and s (N, O), each -1
    or 1,

        y_n = x_n mu + ((x_n * r_n) dw) * s_n:   row n has the weights mu_io + dw_io r_ni s_no,

    which are distributed as w given any signs, while those of two rows are uncorrelated. A bias is mu_o + db_o s_no.
    There is one pattern per site and row, the same at all positions of the inputs and of the kernel of a convolution (r
    is a sign per channel), and in all maps that share the site. The joint distribution within a row is therefore that
    under q, for shared weights too.

    `loc` is site -> mean, for sites whose q is symmetric about it with independent coordinates; `sign` is a source of
    signs. `refuse_shared` refuses rows that interact or are folded into positions.

    Notes
    -----
    The gradient by the mean has the variance of the local reparameterisation. The gradient by the standard deviation
    has about the variance of one draw for all rows: each dw is multiplied by itself in every row, whatever the signs.
    As for `LocalReparameterisation`, only `shared_weights` finds a use outside of linear maps.

    References
    ----------
    Wen et al. (2018), Flipout: efficient pseudo-independent weight perturbations on mini-batches.
    """

    estimator = "flipout"

    def __init__(self, loc: Values, sign: Source):
        super().__init__(loc)
        self.sign = sign
        # Site -> signs (N, I) of the inputs of a weight; site -> signs (N, O) of the outputs of a weight or of a bias.
        self.inner: dict[str, Array] = {}
        self.outer: dict[str, Array] = {}

    def _output(self, applied: Map, x: Array, weight: Array, bias: Any, sites: Sites) -> Array:
        weight_site, bias_site = sites
        rows, width = int(x.shape[0]), int(weight.shape[-1])
        if weight_site is None:
            result = applied(x, weight)
        else:
            if weight_site not in self.inner:
                self.inner[weight_site] = self.sign((rows, int(x.shape[-1])), x)
                self.outer[weight_site] = self.sign((rows, width), x)
            loc = self.loc[weight_site]
            flipped = applied(x * self._spread(self.inner[weight_site], x), weight - loc)
            result = applied(x, loc) + flipped * self._spread(self.outer[weight_site], x)
        if bias is None or bias_site is None:
            return result if bias is None else result + bias
        if bias_site not in self.outer:
            new = weight_site is None
            self.outer[bias_site] = self.sign((rows, width), x) if new else self.outer[weight_site]
        loc = self.loc[bias_site]
        return result + loc + (bias - loc) * self._spread(self.outer[bias_site], x)

    def _spread(self, signs: Array, x: Array) -> Array:
        """Signs (N, K) repeated along all positions of x (N, ..., I)."""
        return signs.reshape(_one_per_row(x, int(signs.shape[-1])))


# --- one layer in closed form -------------------------------------------------------------------------


class MeanOutput(_PerRow):
    """Give the mean output of one linear map, and the expected log likelihood of normal outputs [1]_.

    For a map f = x W + b whose output is that of the network, with a normal W and b, f is normal given x:

        E[log p(y | f)] = log p(y | E f) + gap(E f, Var f),

    the gap by `Likelihood.jensen_gap`. The model ends with f = E f, and `gap` has the second term, summed over rows.

    `loc` has the means of weight and bias, by site; `variance` is the function x (N, I) -> Var f (N, O).

    References
    ----------
    .. [1] Harrison, Willes and Snoek (2024), Variational Bayesian last layers.
    """

    estimator = "the closed form"

    def __init__(self, loc: Values, variance: Callable[[Array], Array]):
        super().__init__(loc)
        self.variance = variance
        self.moments: tuple[Array, Array] | None = None
        self.gap: Any = 0.0

    def process(self, msg: Message) -> None:
        if msg.kind == "observe" and self.moments is not None:
            self.gap = msg.arguments["likelihood"].jensen_gap(*self.moments)
        super().process(msg)

    def _output(self, applied: Map, x: Array, weight: Array, bias: Any, sites: Sites) -> Array:
        self.moments = self._mean(applied, x, weight, bias, sites), self.variance(x)
        return self.moments[0]


# --- sites with several uses per row ----------------------------------------------------------------


class SharedUse(NamedTuple):
    """The reason why a site is not used exactly once in each row, as a kind and in words.

    "positions" are those of a convolution, or of an x with more than two axes; "maps" are several uses in linear maps;
    "rows" are inputs without the rows of the data, or rows that interact; "outside" is a use besides linear maps.
    """

    kind: Literal["positions", "maps", "rows", "outside"]
    reason: str


def shared_weights(
    model: Model, values: Values, x: Any, sites: Collection[str] | None = None
) -> dict[str, SharedUse]:
    """The weights and biases that are not used exactly once in each row, with the reason for each.

    The result is empty if the local reparameterisation is exact. `values` are constrained values of all sites, as
    arrays of a system, and `x` at least two rows, so that rows are distinguished from other axes (all rows where they
    interact). `sites` are all by default. A bias at several positions is listed only for another reason, because it can
    be drawn once per row.

    The network runs twice. If a use outside of linear maps is found, it runs once more for each site, which is then NaN
    everywhere but in its maps. An operation that removes NaN, such as a comparison, hides such a use.
    """
    with NetworkFunction(values) as run, RecordMessages("coupled") as met, RecordLinear(None, values) as maps:
        model(x, None)
    rows, inputs_of = int(run.f.shape[0]), {name: iter(each) for name, each in maps.inputs.items()}
    names: dict[str, list[str]] = {}
    found: dict[str, SharedUse] = {}
    for use in maps.uses:
        inputs = next(inputs_of[use.name])
        for site in (use.weight, use.bias):
            if site is None or site not in (values if sites is None else sites):
                continue
            names.setdefault(site, []).append(use.name)
            if met.messages:
                found[site] = SharedUse("rows", "its use in a model whose rows interact, bnn.coupled")
            elif len(inputs.shape) < 2 or int(inputs.shape[0]) != rows:
                got = f"its use in {use.name!r} on {tuple(inputs.shape)} inputs for {rows} rows of data"
                found[site] = SharedUse("rows", got)
            elif len(inputs.shape) > 2 and site == use.weight:
                what = "a convolution" if use.kind == "conv" else "a map of inputs with more than two axes"
                got = f"its use at several positions, in {use.name!r}, {what}"
                found.setdefault(site, SharedUse("positions", got))
    for site, used in names.items():
        if len(used) > 1:
            got = f"several uses in linear maps: {', '.join(map(repr, used))}"
            found.setdefault(site, SharedUse("maps", got))
    outside = used_elsewhere(model, values, x, names)
    for site in names if outside else ():
        if used_elsewhere(model, values, x, [site]):
            found[site] = SharedUse("outside", "its use outside of linear maps as well")
    return {site: found[site] for site in names if site in found}


def refuse_shared(shared: Mapping[str, SharedUse], estimator: str, approximate: bool = False) -> None:
    """Refuse sites for which an estimator is not exact, before anything is compiled.

    `shared` comes from `shared_weights`; `estimator` is "local" or "flipout". Flipout is correct at all positions and
    in all maps; `approximate` permits the local reparameterisation. The UnsupportedError names the sites.
    """
    for site, use in shared.items():
        within_rows = use.kind in ("positions", "maps")
        if within_rows if estimator == "flipout" else approximate:
            continue
        advice = f"estimator={'flipout' if within_rows else 'plain'!r}"
        advice += ", or approximate=True" if estimator == "local" else ""
        others = [other for other in shared if other != site]
        got = use.reason + (f" (as for {', '.join(others)})" if others else "")
        raise UnsupportedError.of(f"estimator {estimator!r}", f"one use per row of {site!r}", got, advice)


# --- dropout ----------------------------------------------------------------------------------------


class DroppedInputs(NamedHandler):
    """Drop inputs of linear maps and convolutions at random (Srivastava et al. 2014; Gal and Ghahramani 2016).

        x' = x * z / (1 - rate),   z ~ Bernoulli(1 - rate),   so that E x' = x.

    There is one mask per use of a map, row of the data and unit: z is (N, 1, ..., 1, I) for x (N, ..., I), the same at
    all positions, and for a convolution one per channel. A mask of the inputs is a mask of the rows of the weight, so a
    row has one draw of the weights at all positions; dropping each position independently would not be a distribution
    over weights.

    `rates` is the name of a map -> its rate, from 0 to below 1; the inputs of other maps are kept. `keep` is a source
    of zeros and ones.

    References
    ----------
    Srivastava et al. (2014), Dropout: a simple way to prevent neural networks from overfitting.

    Gal and Ghahramani (2016), Dropout as a Bayesian approximation.
    """

    def __init__(self, rates: Mapping[str, float], keep: KeepSource):
        super().__init__("linear map of dropout", rates)
        self.rates = rates
        self.keep = keep

    def process(self, msg: Message) -> None:
        if msg.kind not in ("linear", "conv"):
            return
        self.met.append(msg.name)
        rate = self.rates.get(msg.name, 0.0)
        if rate == 0.0:
            return
        x = msg.arguments["x"]
        expected, got = f"inputs (N, ..., I) of the map {msg.name!r}", f"shape {tuple(x.shape)}"
        UnsupportedError.check(len(x.shape) > 1, "dropout", expected, got, "leaving that map out")
        mask = self.keep(_one_per_row(x, int(x.shape[-1])), x, 1.0 - rate)
        msg.arguments["x"] = x * mask / (1.0 - rate)
