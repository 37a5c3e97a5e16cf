"""Graph convolutions against the normalised adjacency in closed form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch

import ppl_bnn as bnn
from ppl_bnn import likelihoods, ops
from ppl_bnn.backends.program import Problem, Program
from ppl_bnn.backends.systems import system
from ppl_bnn.core.arrays import map_data
from ppl_bnn.core.errors import ModelError, UnsupportedError
from ppl_bnn.inference.curvature.jacobian import linear_maps
from ppl_bnn.language.layers.graph import graph_conv
from tests.layer_oracles import asked, check, log_joint_and_predictor, of_torch, values_of

NODES, FEATURES, WIDTH = 6, 3, 2
# A path, a triangle, and the last node by itself.
EDGES = np.array([[0, 1], [2, 1], [2, 3], [3, 4], [4, 2]])
ADJACENCY = np.zeros((NODES, NODES))
ADJACENCY[EDGES[:, 0], EDGES[:, 1]] = ADJACENCY[EDGES[:, 1], EDGES[:, 0]] = 1.0
WEIGHTED = ADJACENCY * np.add.outer(np.arange(1.0, 7.0), np.arange(1.0, 7.0)) / 5
SITES: dict[str, tuple[int, ...]] = {"g.weight": (FEATURES, WIDTH), "g.bias": (WIDTH,)}


def normalised(adjacency: np.ndarray) -> np.ndarray:
    """D^(-1/2) (A + 1) D^(-1/2), with SciPy's matrix power."""
    loops = adjacency + np.eye(len(adjacency))
    root = scipy.linalg.fractional_matrix_power(np.diag(loops.sum(1)), -0.5)
    return root @ loops @ root


@pytest.mark.parametrize("given", ["adjacency", "weighted", "edges"])
def test_a_graph_convolution_is_a_product_with_the_normalised_adjacency(
    rng: np.random.Generator, given: str
) -> None:
    adjacency = WEIGHTED if given == "weighted" else ADJACENCY
    values, x, pull = values_of(SITES), rng.normal(size=(NODES, FEATURES)), rng.normal(size=(NODES, WIDTH))
    leaves = {name: torch.tensor(value, requires_grad=True) for name, value in {**values, "x": x}.items()}
    # torch's functions, and the product in the other order.
    product = torch.tensor(normalised(adjacency)) @ (leaves["x"] @ leaves["g.weight"])
    wanted = of_torch(product + leaves["g.bias"], pull, leaves)

    def layer(x: Any) -> Any:
        if given == "edges":
            return graph_conv("g", x, WIDTH, edges=EDGES)
        return graph_conv("g", x, WIDTH, ops.asarray(adjacency, like=x))

    check(layer, values, x, pull, wanted)


def two_layers(x: Any, y: Any = None) -> None:
    h = ops.relu(graph_conv("g0", x["features"], 4, x["adjacency"]))
    bnn.observe(y, graph_conv("g1", h, 3, x["adjacency"]), likelihoods.Categorical())


# The adjacency of the data are whole numbers: checks of the input leave them so.
GRAPH = {
    "features": np.random.default_rng(47).normal(size=(NODES, FEATURES)),
    "adjacency": ADJACENCY.astype(int),
}
LABELS = np.arange(NODES) % 3


def test_a_graph_network_is_the_same_in_both_systems() -> None:
    ours, theirs = (log_joint_and_predictor(ppl, two_layers, GRAPH, LABELS) for ppl in ("numpyro", "pyro"))
    assert ours[0] == pytest.approx(theirs[0], rel=1e-10)
    for name, gradient in ours[1].items():
        np.testing.assert_allclose(gradient, theirs[1][name], rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(ours[2], theirs[2], rtol=0, atol=1e-10)


def test_rows_of_a_graph_are_known_to_interact(ppl: str) -> None:
    chosen = system(ppl)
    with chosen.session("float64", "cpu", 1):
        x, y = map_data(chosen.asarray, GRAPH), chosen.asarray(LABELS)
        program = Program.of(chosen, two_layers, x, y, language=True)
        assert program.coupled
        u = {name: np.zeros(site.unconstrained_shape) for name, site in program.sites.items()}
        with pytest.raises(UnsupportedError, match="rows that do not interact"):
            linear_maps(Problem(program, x, y, GRAPH, LABELS, 0, "cpu", "float64"), u)


def test_sites_and_priors() -> None:
    sites = asked(lambda: graph_conv("g", GRAPH["features"], WIDTH, ADJACENCY))
    assert {name: site.shape for name, site in sites.items()} == SITES
    assert sites["g.weight"].arguments["scale"] == pytest.approx(FEATURES**-0.5)
    assert list(asked(lambda: graph_conv("g", GRAPH["features"], 2, ADJACENCY, bias=False))) == ["g.weight"]


X = np.zeros((3, 2))
A = np.array([[0, 1, 0], [1, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize(
    ("action", "says"),
    [
        (
            lambda: graph_conv("g", X, 2),
            r"graph_conv\('g'\): expected either adjacency or edges; got neither",
        ),
        (lambda: graph_conv("g", X, 2, A, EDGES), "got both"),
        (lambda: graph_conv("g", X, 0, A), "a positive whole number as width"),
        (lambda: graph_conv("g", X[None], 2, A), r"features \(N, F\)"),
        (lambda: graph_conv("g", X, 2, A[:2]), r"an adjacency of shape \(3, 3\); got shape \(2, 3\)"),
        (lambda: graph_conv("g", X, 2, -A), "got a negative one"),
        (lambda: graph_conv("g", X, 2, np.triu(A)), "got one that is not symmetric"),
        (lambda: graph_conv("g", X, 2, A + np.eye(3)), "got an edge from a node to itself"),
        (lambda: graph_conv("g", X, 2, edges=EDGES), r"nodes 0\.\.2; got 0\.\.4"),
        (lambda: graph_conv("g", X, 2, edges=EDGES / 2), r"edges \(E, 2\), whole numbers.*got float64"),
        (lambda: graph_conv("g", X, 2, edges=np.array([[0, 1], [1, 0]])), "each edge once"),
        (lambda: graph_conv("g", X, 2, edges=np.array([[1, 1]])), "each edge once"),
    ],
)
def test_impossible_graphs_are_refused(action: Callable[[], Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        asked(action)


def test_a_graph_network_predicts_all_nodes_at_once(ppl: str) -> None:
    posterior = bnn.fit(two_layers, GRAPH, LABELS, bnn.MAP(ppl=ppl, steps=3, polish=False))
    assert posterior.predict(GRAPH).probabilities.shape == (NODES, 3)
