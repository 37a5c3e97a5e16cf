"""The primitives of the language, and the stack of effect handlers that interprets them.

A primitive creates a `Message` and sends it down the stack of handlers of the running thread, innermost first. The
interpretation at the bottom (NumPyro, Pyro, or the network function) answers what no handler above it answered. A model
therefore never names a system, a key, a device, a method or a batch size.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

from ppl_bnn.core.errors import ModelError, check_known
from ppl_bnn.language import ops
from ppl_bnn.language.distributions import Distribution
from ppl_bnn.language.likelihoods import Likelihood

# The sites and the plates of the language itself; in a system both share one namespace.
RESERVED = ("f", "y", "observations", "rows")
_ONE = "exactly one `observe` in a model"
_local = threading.local()


@dataclass
class Message:
    """One effect on its way down the stack.

    `kind` is "sample", "deterministic", "param", "observe", "rows", "coupled", "linear", "conv" or "held"; `name` that
    of the site, map or module; `arguments` are those of the primitive; `value` is the answer, if `answered`, after
    which no handler below runs.
    """

    kind: str
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    value: Any = None
    answered: bool = False

    def answer(self, value: Any) -> None:
        """Set the value and mark the message as answered."""
        self.value = value
        self.answered = True


class Handler:
    """An interpretation, or a change to one, used as a context manager around a run of the model.

    `process` sees a message on its way down and may answer it; `after` sees it, answered, on its way up and may change
    the value. `sees_maps` says whether the handler may read or change linear maps; then a layer that repeats a step
    sends every step through the stack.
    """

    sees_maps = True

    def process(self, msg: Message) -> None:
        pass

    def after(self, msg: Message) -> None:
        pass

    def __enter__(self) -> Self:
        _stack().append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        popped = _stack().pop()
        assert popped is self


class NamedHandler(Handler):
    """A handler about some sites or maps, which raises UnknownNameError if a run has none of one of these names.

    `kind` says in the message what the names are. A subclass appends those that a run has to `met`.
    """

    def __init__(self, kind: str, names: Iterable[str]):
        self.kind = kind
        self.names = dict.fromkeys(names)
        self.met: list[str] = []

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        if exception[0] is None:
            check_known(self.kind, self.names, self.met)


class Interpretation(Handler):
    """The bottom of a stack: interprets every primitive and checks the rules of a model.

    The rules: names are unique, those in `RESERVED` are taken, `rows` gets the number of rows, and there is exactly one
    `observe`. A broken rule raises ModelError. After the run `f` is the network output, (N, K), and `likelihood` has
    its values filled in.
    """

    sees_maps = False

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.f: Any = None
        self.likelihood: Any = None
        self.weight: Any = None
        self.row_count: int | None = None

    @property
    def predictor(self) -> Any:
        """eta (N, D): the parameters of the likelihood for each row."""
        return self.likelihood.predictor(self.f)

    def process(self, msg: Message) -> None:
        name, check = msg.name, ModelError.check
        if msg.kind in ("sample", "deterministic", "param"):
            expected = f"a name other than {', '.join(RESERVED)}, which the language uses itself"
            check(name not in RESERVED, f"site {name!r}", expected, repr(name), "another name")
            expected, got = "a different name for every site", f"two sites named {name!r}"
            check(name not in self.names, "", expected, got, "renaming one of them")
            self.names.add(name)
        elif msg.kind == "observe":
            check(self.likelihood is None, "", _ONE, "a second one", "one likelihood over all outputs")
            self.f, self.likelihood = msg.arguments["f"], msg.arguments["likelihood"]
            self.weight = msg.arguments["weight"]
            self._check_rows(self.f.shape[0])
            msg.answer(None)
        elif msg.kind == "rows":
            self._check_rows(msg.arguments["n"])

    def _check_rows(self, n: int) -> None:
        """Refuse a plate of another size, which would be broadcast against the rows or have draws for other rows."""
        expected, got = "the number of rows of x, the same throughout", f"{self.row_count} and {n}"
        ModelError.check(self.row_count in (None, n), "rows", expected, got, "bnn.rows(x.shape[0])")
        self.row_count = n

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        if exception[0] is None:
            observed, advice = self.likelihood is not None, "bnn.observe(y, f, likelihood) as its end"
            ModelError.check(observed, "", _ONE, "none", advice)


def _stack() -> list[Handler]:
    return _local.__dict__.setdefault("stack", [])


def maps_are_seen() -> bool:
    """Whether a handler of this thread may read single linear maps."""
    return any(handler.sees_maps for handler in _stack())


def send(msg: Message) -> Any:
    """Send `msg` down the stack and return its value. Raises ModelError without an interpretation."""
    stack = _stack()
    if not stack:
        expected, got = "a running interpretation", "a call of the model as a bare function"
        advice = "bnn.fit, bnn.as_numpyro(model) or bnn.as_pyro(model)"
        raise ModelError.of(f"bnn.{msg.kind}({msg.name!r})", expected, got, advice)
    reached = 0
    for handler in reversed(stack):
        reached += 1
        handler.process(msg)
        if msg.answered:
            break
    if not msg.answered:
        msg.answer(_default(msg))
    for handler in stack[-reached:]:
        handler.after(msg)
    return msg.value


def _default(msg: Message) -> Any:
    """The value of a primitive that no handler answers."""
    given = msg.arguments
    match msg.kind:
        case "deterministic":
            return given["value"]
        case "rows":
            return contextlib.nullcontext()
        case "coupled":
            return None
        case "held":
            return given["output"]()
        case "linear" | "conv":
            result = apply_map(msg, given["x"], given["weight"])
            return result if given["bias"] is None else result + given["bias"]
    raise ModelError(f"no handler gives {msg.kind} {msg.name!r} a value")


def apply_map(msg: Message, x: Any, weight: Any) -> Any:
    """The linear map or the convolution of a message, on other inputs or with another weight, without its bias."""
    if msg.kind == "linear":
        return ops.matmul(x, weight)
    convolve = ops.conv1d if len(weight.shape) == 3 else ops.conv2d
    return convolve(x, weight, msg.arguments["stride"], msg.arguments["padding"])


def sample(name: str, distribution: Distribution, obs: Any = None) -> Any:
    """Sample a random variable, or observe it.

    Parameters
    ----------
    name : str
        Name of the site.
    distribution : Distribution
        Its distribution.
    obs : array, optional
        An observation of it.

    Returns
    -------
    array
        The value.

    Raises
    ------
    ModelError
        `distribution` is not a distribution of `ppl_bnn.dist`.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     noise = bnn.sample("noise", bnn.dist.HalfNormal(1.0))
    ...     bnn.observe(y, bnn.mlp(x, [1]), bnn.likelihoods.Gaussian(noise))
    >>> bnn.zoo.sketch(model, 4).sites[0].prior
    'HalfNormal(1)'
    """
    if not isinstance(distribution, Distribution):
        expected, got = "a distribution of ppl_bnn.dist", type(distribution).__name__
        raise ModelError.of(f"sample({name!r})", expected, got, "dist.Normal(0.0, 1.0)")
    return send(Message("sample", name, {"distribution": distribution, "obs": obs}))


def deterministic(name: str, value: Any) -> Any:
    """Record `value` under `name`, and return it.

    Parameters
    ----------
    name : str
        Name of the site.
    value : array
        Its value.

    Returns
    -------
    array
        The value, unchanged.

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     double = bnn.deterministic("double", 2.0 * x)  # part of the posterior's draws
    ...     w = bnn.sample("w", bnn.dist.Normal(0.0, 1.0).expand((1, 1)).to_event())
    ...     bnn.observe(y, double @ w, bnn.likelihoods.Gaussian(1.0))
    >>> bnn.network_function(model)({"w": np.array([[2.0]])}, np.array([[1.0], [3.0]]))
    array([[ 4.],
           [12.]])
    """
    return send(Message("deterministic", name, {"value": value}))


def param(name: str, init: Any) -> Any:
    """A parameter without a prior, fitted by methods that have an optimiser.

    Parameters
    ----------
    name : str
        Name of the site.
    init : array, float or Distribution
        The start, or a distribution from which the method draws it.

    Returns
    -------
    array
        The value.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     shift = bnn.param("shift", 0.0)
    ...     bnn.observe(y, bnn.mlp(x, [1], bias=False) + shift, bnn.likelihoods.Gaussian(1.0))
    >>> bnn.zoo.sketch(model, 4).sites[0]
    SiteSketch(name='shift', prior='none: a parameter', shape=(), local=False)
    """
    return send(Message("param", name, {"init": init}))


def linear(name: str, x: Any, weight: Any, bias: Any = None) -> Any:
    """The map `x @ weight + bias`, visible to handlers.

    Parameters
    ----------
    name : str
        Name of the map.
    x : array
        Inputs, (..., I).
    weight : array
        Weight, (I, O).
    bias : array, optional
        Bias, (O,).

    Returns
    -------
    array
        Outputs, (..., O).

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     w = bnn.sample("w", bnn.dist.Normal(0.0, 1.0).expand((1, 1)).to_event())
    ...     bnn.observe(y, bnn.linear("layer", x, w), bnn.likelihoods.Gaussian(1.0))
    >>> bnn.network_function(model)({"w": np.array([[2.0]])}, np.array([[1.0], [3.0]]))
    array([[2.],
           [6.]])
    """
    return send(Message("linear", name, {"x": x, "weight": weight, "bias": bias}))


def conv(
    name: str, x: Any, weight: Any, bias: Any = None, stride: ops.Pair = 1, padding: ops.AnyPadding = "valid"
) -> Any:
    """The convolution `ops.conv2d(x, weight, stride, padding) + bias`, visible to handlers.

    It is the linear map of `ops.patches(x, (kh, kw), stride, padding)` with the weight `weight.reshape(-1, O)`, one use
    per position. With x (N, T, C) and weight (k, C, O) it is `ops.conv1d`, with the kernel k.

    Parameters
    ----------
    name : str
        Name of the map.
    x : array
        Inputs, (N, H, W, C) or (N, T, C).
    weight : array
        Weight, (kh, kw, C, O) or (k, C, O).
    bias : array, optional
        Bias, (O,).
    stride : int or tuple of int
        As in `ops.conv2d` or `ops.conv1d`.
    padding : str, int or tuple
        As in `ops.conv2d` or `ops.conv1d`.

    Returns
    -------
    array
        Outputs, (N, H', W', O) or (N, T', O).

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     w = bnn.sample("w", bnn.dist.Normal(0.0, 1.0).expand((3, 3, 1, 2)).to_event())
    ...     bnn.observe(y, bnn.conv("layer", x, w).mean((1, 2)), bnn.likelihoods.Categorical())
    >>> bnn.network_function(model)({"w": np.ones((3, 3, 1, 2))}, np.ones((1, 8, 8, 1)))
    array([[9., 9.]])
    """
    arguments = {"x": x, "weight": weight, "bias": bias, "stride": stride, "padding": padding}
    return send(Message("conv", name, arguments))


def rows(n: int) -> contextlib.AbstractContextManager[Any]:
    """The plate of the rows: latent variables sampled inside belong to single rows, one for each of `n` rows.

    They are drawn again at new rows. Methods that do not support them refuse by name.

    Parameters
    ----------
    n : int
        Number of rows.

    Returns
    -------
    context manager
        The block in which the variables are sampled.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     with bnn.rows(len(x)):
    ...         shift = bnn.sample("shift", bnn.dist.Normal(0.0, 1.0))  # one for each row: (N,)
    ...     bnn.observe(y, bnn.mlp(x, [1]) + shift[..., None], bnn.likelihoods.Gaussian(0.1))
    >>> [site.local for site in bnn.zoo.sketch(model, 4).sites]
    [True, False, False]
    """
    return send(Message("rows", "rows", {"n": int(n)}))


def coupled() -> None:
    """Declare that the rows interact (a graph): no mini-batches and no predictions in chunks of rows.

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     bnn.coupled()  # each row is compared with the mean over all rows
    ...     w = bnn.sample("w", bnn.dist.Normal(0.0, 1.0).expand((1, 1)).to_event())
    ...     bnn.observe(y, (x - x.mean(0)) @ w, bnn.likelihoods.Gaussian(1.0))
    >>> bnn.network_function(model)({"w": np.array([[2.0]])}, np.array([[1.0], [3.0]]))
    array([[-2.],
           [ 2.]])
    """
    send(Message("coupled", "coupled"))


def observe(y: Any, f: Any, likelihood: Any, weight: Any = None) -> None:
    """The end of a model: the likelihood of the targets given the network output.

        log p(y | w) = sum_n weight_n log p(y_n | f_n(w))

    Records `f` as site "f" and the observation as site "y". Rows are conditionally independent given the weights.
    Nothing is broadcast.

    Parameters
    ----------
    y : array or None
        Targets; with None they are drawn.
    f : array
        Network output, (N, K).
    likelihood : Likelihood
        The likelihood, an instance of a subclass of `bnn.likelihoods.Likelihood`.
    weight : array, optional
        How many times each row counts, (N,), not negative; 1 by default. It does not change predictions, and a
        leave-one-out score leaves out the row with all its weight. A model takes it from a dict x, whose entry must be
        called "weight" if the fit standardises: it is then not changed, and means and deviations are weighted.

    Raises
    ------
    ModelError
        `f` is not (N, K) or does not fit the likelihood, or `y` or `weight` does not fit `f`.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     f = bnn.mlp(x, [1])  # (N, 1)
    ...     bnn.observe(y, f, bnn.likelihoods.Bernoulli())  # y: (N,), labels 0 and 1
    >>> bnn.zoo.sketch(model, 4).task
    'classification'
    """
    if not isinstance(likelihood, Likelihood):
        got = f"the class {likelihood.__name__}" if isinstance(likelihood, type) else repr(likelihood)
        advice = "bnn.likelihoods.Gaussian(noise), or a subclass of bnn.likelihoods.Likelihood"
        raise ModelError.of("observe", "an instance of a likelihood", got, advice)
    shape, expected = tuple(getattr(f, "shape", ())), "a network output f of shape (N, K)"
    ModelError.check(len(shape) == 2, "observe", expected, f"shape {shape}", "f[:, None] for one output")
    likelihood.check(shape, None if y is None else tuple(y.shape))
    got = None if weight is None else tuple(getattr(weight, "shape", ()))
    expected = f"a weight of shape {shape[:1]}"
    ModelError.check(got in (None, shape[:1]), "observe", expected, f"shape {got}", "one number per row")
    send(Message("observe", "y", {"y": y, "f": f, "likelihood": likelihood, "weight": weight}))
