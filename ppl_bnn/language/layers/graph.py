"""Layers on a graph: rows that depend on their neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np

from ppl_bnn.core.errors import ModelError
from ppl_bnn.language import ops
from ppl_bnn.language.layers.declarations import Bias, Layer
from ppl_bnn.language.primitives import coupled
from ppl_bnn.language.prior_parts import Prior


def graph_conv(
    name: str,
    x: Any,
    width: int,
    adjacency: Any = None,
    edges: Any = None,
    prior: Prior | None = None,
    bias: Bias = True,
) -> Any:
    """The graph convolution of Kipf and Welling (2017).

    A node and its neighbours are summed, and a linear map follows:

        result = D^(-1/2) (A + 1) D^(-1/2) x W + b,   D the diagonal of the sums of rows of A + 1.

    Samples `name.weight` (F, width) and `name.bias` (width,). Calls `coupled()`, because rows interact: there are no
    mini-batches, and a prediction is for all nodes of the given graph.

    The graph is undirected, and given by either `adjacency` or `edges`.

    Parameters
    ----------
    name : str
        Name of the layer.
    x : array
        Features, (N, F), a row for each node.
    width : int
        Number of outputs.
    adjacency : array, optional
        A (N, N), symmetric, not negative, zeros on the diagonal. It has a row for each node, so it may be part of the
        data, x = {"features": ..., "adjacency": ...}.
    edges : array, optional
        (E, 2) integers in NumPy, each edge once in either direction, known when the model is written (bind them by
        functools.partial). Takes memory in proportion to E instead of N^2.
    prior : Prior, optional
        Prior of the weight and the bias, by default N(0, 1 / F).
    bias : bool or Prior
        Whether there is a bias, or a prior of its own.

    Returns
    -------
    array
        Outputs, (N, width).

    Raises
    ------
    ModelError
        An argument does not fit.

    References
    ----------
    Kipf and Welling (2017), Semi-supervised classification with graph convolutional networks.

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     f = bnn.graph_conv("conv", x, width=2, edges=np.array([[0, 1], [1, 2]]))
    ...     bnn.observe(y, f, bnn.likelihoods.Categorical())
    >>> [(site.name, site.shape) for site in bnn.zoo.sketch(model, np.ones((3, 4))).sites]
    [('conv.weight', (4, 2)), ('conv.bias', (2,))]
    """
    layer = Layer("graph_conv", name, prior, bias)
    width = layer.whole("width", width, 16)
    shape = tuple(map(int, x.shape))
    layer.check(len(shape) == 2, "features (N, F), a row for each node", f"shape {shape}", "x[:, None]")
    one, got = (adjacency is None) != (edges is None), "neither" if edges is None else "both"
    layer.check(one, "either adjacency or edges", got, "adjacency=x['adjacency']")
    coupled()
    if edges is None:
        _check_adjacency(layer, adjacency, shape[0])
        matrix = ops.in_floats(adjacency, like=x)
        scale = (1.0 + ops.sum(matrix, -1))[:, None] ** -0.5
        scaled = scale * x
        total = scale * (ops.matmul(matrix, scaled) + scaled)
    else:
        checked = _checked_edges(layer, edges, shape[0])
        # Every edge in both directions.
        giving, taking = np.concatenate([checked, checked[:, ::-1]]).T
        degrees = 1.0 + np.bincount(taking, minlength=shape[0])
        scale = ops.in_floats(degrees[:, None] ** -0.5, like=x)
        scaled = scale * x
        total = scale * (ops.segment_sum(scaled[giving], taking, shape[0]) + scaled)
    return layer.linear("", total, width)


def _check_adjacency(layer: Layer, adjacency: Any, nodes: int) -> None:
    shape = tuple(getattr(adjacency, "shape", ()))
    good, expected = shape == (nodes, nodes), f"an adjacency of shape {(nodes, nodes)}"
    layer.check(good, expected, f"shape {shape}", "all nodes at once")
    if (seen := ops.concrete(adjacency)) is not None:
        expected = "a symmetric adjacency, not negative, with zeros on the diagonal"
        advice = "np.maximum(A, A.T)"
        layer.check(not (seen < 0).any(), expected, "a negative one", advice)
        layer.check((seen == seen.T).all(), expected, "one that is not symmetric", advice)
        layer.check(not np.diag(seen).any(), expected, "an edge from a node to itself", advice)


def _checked_edges(layer: Layer, edges: Any, nodes: int) -> np.ndarray:
    """Edges (E, 2), each once, between different existing nodes."""
    seen = edges if isinstance(edges, np.ndarray) else ops.concrete(edges)
    if seen is None or seen.ndim != 2 or seen.shape[1] != 2 or seen.dtype.kind not in "iu":
        traced = "an array whose numbers cannot be seen"
        got = traced if seen is None else f"{seen.dtype} of shape {seen.shape}"
        raise ModelError.of(layer.word, "edges (E, 2), whole numbers in NumPy", got, "np.array([[0, 1]])")
    if len(seen):
        good, got = seen.min() >= 0 and seen.max() < nodes, f"{seen.min()}..{seen.max()}"
        layer.check(good, f"edges between nodes 0..{nodes - 1}", got, "all nodes as rows")
    ends = np.sort(seen.astype(np.int64), 1)
    good = (ends[:, 0] != ends[:, 1]).all() and len(np.unique(ends, axis=0)) == len(ends)
    got = "an edge twice (perhaps in both directions) or from a node to itself"
    advice = "np.unique(np.sort(edges, 1), axis=0)"
    layer.check(good, "each edge once, between two nodes", got, advice)
    return ends
