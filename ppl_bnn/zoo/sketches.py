"""Size, task and sites of a model, from one run without a framework."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ppl_bnn.core.errors import InputError, ModelError
from ppl_bnn.core.notebook.html import Listing, card
from ppl_bnn.language.distributions import Distribution, draw_shape, fields_of, in_words
from ppl_bnn.language.primitives import Interpretation, Message
from ppl_bnn.zoo.files import Model, as_arrays

# Largest number of parameters and of sites of a model; for larger models no method ends.
MOST_NUMBERS, MOST_SITES = 10**8, 10**5


class TooLargeError(InputError):
    """A model with more parameters than can be inferred.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> bnn.zoo.sketch(bnn.zoo.load("regression_mlp", width=10**9), 10)
    Traceback (most recent call last):
        ...
    ppl_bnn.zoo.sketches.TooLargeError: model: expected at most 100 million numbers to infer; got ...
    """


@dataclass(frozen=True)
class SiteSketch:
    """A site in one run of a model.

    Parameters
    ----------
    name : str
        Name of the site.
    prior : str
        The distribution: numbers as they were given, and "..." for values computed from other sites.
    shape : tuple of int
        Shape of the site.
    local : bool
        Whether each row has its own value, of this shape.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> bnn.zoo.sketch(bnn.zoo.load("linear_regression"), 10).sites[0]
    SiteSketch(name='noise', prior='HalfNormal(1)', shape=(), local=False)
    """

    name: str
    prior: str
    shape: tuple[int, ...]
    local: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Sketch:
    """Size, task and sites of a model, from one run. Made by `sketch`.

    Parameters
    ----------
    parameters : int
        Number of unknowns that the model infers, including those of one row if rows have their own.
    task : str
        "regression" or "classification".
    sites : tuple of SiteSketch
        The sites of these unknowns.
    likelihood : str
        Distribution of the targets, in words.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> sketch = bnn.zoo.sketch(bnn.zoo.load("linear_regression"), 10)
    >>> sketch.parameters, sketch.task, sketch.likelihood
    (12, 'regression', 'Gaussian(...)')
    """

    parameters: int
    task: str
    sites: tuple[SiteSketch, ...] = field(default=(), compare=False)
    likelihood: str = field(default="", compare=False)

    @property
    def per_row(self) -> int:
        """Number of `parameters` that each row has of its own."""
        return sum(site.size for site in self.sites if site.local)

    @property
    def shared(self) -> int:
        """Number of `parameters` that all rows share."""
        return self.parameters - self.per_row

    def _repr_html_(self) -> str:
        """The sites with their priors and shapes, as `ppl-bnn show` prints them."""
        rows = []
        for site in self.sites:
            shape = " x ".join(map(str, site.shape)) or "-"
            rows.append(
                (site.name, site.prior, f"{'each row: ' if site.local else ''}{shape}", str(site.size))
            )
        rows.append(("in all", "", "", str(self.shared)))
        rows += [("and for each row", "", "", str(self.per_row))] if self.per_row else []
        sites = Listing("", ("site", "prior", "shape", "numbers"), rows, words=3)
        return card(f"A model for {self.task}", sites, f"y, given x and these: {self.likelihood}")


def sketch(model: Model, inputs: Any) -> Sketch:
    """Run `model` once with every site set to one, without a framework, to find its size, its task and its sites.

    Parameters
    ----------
    model : Model
        The model.
    inputs : int, array, list or dict
        The number of features of a table, for one row of ones (integers for a model of symbols). Or an example of other
        inputs: an array, a dict of arrays with a common first axis, or lists for them (`Card.example`). One row is
        enough: it is a graph of one node if rows interact. Variables of the rows are counted for one row.

    Returns
    -------
    Sketch
        What was found.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> for site in bnn.zoo.sketch(bnn.zoo.load("linear_regression"), 10).sites:
    ...     print(site.name, site.prior, site.shape)
    noise HalfNormal(1) ()
    output.weight Normal(0, 1) (10, 1)
    output.bias Normal(0, 1) (1,)
    """
    if not isinstance(inputs, int | np.integer):
        return _sketch_at(model, as_arrays(inputs))
    ones = np.ones((1, inputs))
    try:
        return _sketch_at(model, ones)
    except ModelError:
        with contextlib.suppress(ModelError):
            return _sketch_at(model, ones.astype(np.int64))
        raise


def _sketch_at(model: Model, x: Any) -> Sketch:
    with _Sketching() as run:
        model(x, None)
    likelihood = in_words(type(run.likelihood).__name__, fields_of(run.likelihood))
    return Sketch(sum(site.size for site in run.sites), run.likelihood.task, tuple(run.sites), likelihood)


class _Sketching(Interpretation):
    """Sets every site to one in its shape and records it; a site that is too large is refused."""

    def __init__(self) -> None:
        super().__init__()
        self.sites: list[SiteSketch] = []
        self.in_rows = False

    def process(self, msg: Message) -> None:
        super().process(msg)
        match msg.kind:
            case "sample" | "param":
                given = msg.arguments["distribution" if msg.kind == "sample" else "init"]
                shape = draw_shape(given) if isinstance(given, Distribution) else np.shape(given)
                shape = tuple(map(int, shape))
                self._check_size(msg.name, shape)
                if msg.arguments.get("obs") is None:
                    sampled = msg.kind == "sample"
                    prior = in_words(given.family, given.arguments) if sampled else "none: a parameter"
                    self.sites.append(SiteSketch(msg.name, prior, shape, self.in_rows))
                msg.answer(np.ones(shape))
            case "rows":
                self.in_rows = True
                plate = contextlib.ExitStack()
                plate.callback(setattr, self, "in_rows", False)
                msg.answer(plate)

    def _check_size(self, name: str, shape: tuple[int, ...]) -> None:
        size = sum(site.size for site in self.sites) + math.prod(shape)
        got = f"{size:,} with site {name!r}" if size > MOST_NUMBERS else f"more than {MOST_SITES:,} sites"
        within = size <= MOST_NUMBERS and len(self.sites) < MOST_SITES
        expected = "at most 100 million numbers to infer"
        TooLargeError.check(within, "model", expected, got.replace(",", " "), "a smaller model")
