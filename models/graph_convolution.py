"""Classification of the nodes of a graph: a node and its neighbours are added up before each linear map.

    A_nm = 1 where rows are neighbours, else 0, A_nn = 0   S = D^(-1/2) (A + identity) D^(-1/2)   D_nn = 1 + sum_m A_nm
    W1_jk ~ N(0, sigma^2 / F)    b1_k ~ N(0, sigma^2)         h = tanh(S x W1 + b1)              H = width hidden units
    W2_kc ~ N(0, sigma^2 / H)    b2_c ~ N(0, sigma^2)         f = S h W2 + b2                    c = 1..C
    P(y_n = c | x) = exp(f_nc) / sum_c' exp(f_nc')

The graph comes with the data, x = {"features": (N, F), "adjacency": (N, N) whole numbers}, or of features alone rows
are neighbours where the mean over features of (x_nj - x_mj)^2 is below radius^2. That depends on the two rows only, so
the graph of some rows is a part of the graph of all. A row without neighbours is a row of a plain network.

Sizes: (F + C + 1) H + C numbers (67 on its default data).
Default data: iris (150 rows, 4 features, 3 classes), standardised.
Source: T. N. Kipf and M. Welling, Semi-supervised classification with graph convolutional networks (2017); as a
Bayesian network Y. Zhang et al., Bayesian graph convolutional neural networks for semi-supervised classification
(2019).

What a prediction means: the rows that it is given are the graph. New rows are neighbours of each other and not of the
training rows, and what is said of one changes with those that come along: predict together what belongs together. With
an adjacency in the data a prediction is about a graph of as many nodes.

What is hard about its posterior: adding up makes neighbours alike, so a label speaks for a whole neighbourhood, a wrong
label or a wrong edge too, and the posterior is as narrow as if they were right. Where most rows have the same
neighbours, the rows of S x span few directions, and what of W1 is orthogonal to them keeps its prior. Copies of modes
and separable classes are those of classification_mlp. Rows interact: no mini-batches, no local reparameterisation or
Flipout, and of Laplace curvature="hessian" or engine="guide" alone.
"""

from __future__ import annotations

from typing import Any

import ppl_bnn as bnn
from ppl_bnn import likelihoods, ops, priors

DATA = "iris"


def model(
    x: Any, y: Any = None, *, classes: int = 3, width: int = 8, radius: float = 0.3, sigma: float = 1.0
) -> None:
    """Two graph convolutions with `width` tanh units between and `classes` logits.

    x: (N, F), or a dict of features and adjacency. y: (N,), labels 0..classes-1. radius: root mean square difference of
    neighbours, in the units in which the model sees x. sigma: prior standard deviation of a weight, times sqrt(fan-in).
    """
    if isinstance(x, dict):
        features, adjacency = x["features"], x["adjacency"]
    else:
        features, difference = x, x[:, None, :] - x[None, :, :]
        near = ops.in_floats(ops.mean(difference**2, -1) < radius**2, like=x)
        # No row is its own neighbour, though none is nearer.
        adjacency = near - ops.diagonal_matrix(ops.ones_like(x[:, 0]))
    prior = priors.Normal(0.0, "fan_in", sigma)
    h = ops.tanh(bnn.graph_conv("hidden0", features, width, adjacency, prior=prior))
    bnn.observe(y, bnn.graph_conv("output", h, classes, adjacency, prior=prior), likelihoods.Categorical())
