"""Digits by one hidden layer with two learned scales, after the neural network of posteriordb.

    v_1, v_2 ~ InverseGamma(nu / 2, nu q / 2), one for each layer, with its own q
    alpha_jk ~ N(0, v_1), biases too      h_n = tanh(x_n alpha)                               H = width hidden units
    beta_kc  ~ N(0, v_2), biases too      f_n = (0, h_n beta)      P(y_n = c | x_n) = exp(f_nc) / sum_c' exp(f_nc')

The first class has the logit 0 (1 with `exchanged`), the others c = 2..C have one each. nu = 1/2 and q = (0.05 / M^2)^2
with M the inputs of the layer (F or H), a vague prior with most of its mass at tiny scales and a tail that reaches far.
The program of posteriordb has these two numbers, too, but biases ~ N(0, 1), and the first class has the logit 1. An
early version (commit 0c9534e) has biases as here and the numbers the other way round, nu = (0.05 / M^2)^2 and q = 1/2,
which is log-uniform to all digits and has no draws that a computer can hold; `exchanged=True` is that program.

Sizes: (F + 1) H + (H + 1) (C - 1) + 2 numbers (751 on its default data).
Default data: digits (1797 images of 8 x 8 pixels, 10 classes), standardised; `mnist` for the images of posteriordb.
Source: posteriordb, models nn_rbm1bJ10 and nn_rbm1bJ100 (Stan), after J. Lampinen and A. Vehtari, Bayesian approach for
neural networks: review and case studies (2001).

What is hard about its posterior: all at once. Scales are centred, so weights and v make a funnel, and the density is
highest where v and the weights are next to nothing and every class is as likely as any other: a mode that MAP and
Laplace can fall into, and most draws of the prior lie beside it. `bnn.noncentred` is the same posterior without the
funnel. With rows enough v is well determined, and the centred form mixes; then the copies of each mode and separable
classes remain (see classification_mlp).
"""

from __future__ import annotations

from typing import Any

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, ops, priors

DATA = "digits"


def model(x: Any, y: Any = None, *, classes: int = 10, width: int = 10, exchanged: bool = False) -> None:
    """One hidden layer of `width` tanh units, `classes` - 1 free logits, and one variance for each layer.

    x: (N, F). y: (N,), labels 0..classes-1. exchanged: the early version of the program.
    """

    def layer(name: str, inputs: int) -> priors.Normal:
        small = (0.05 / inputs**2) ** 2
        degrees, scale = (small, 0.5) if exchanged else (0.5, small)
        variance = bnn.sample(f"{name}.variance", dist.InverseGamma(0.5 * degrees, 0.5 * degrees * scale))
        return priors.Normal(0.0, ops.sqrt(variance))

    h = ops.tanh(bnn.dense("hidden0", x, width, layer("hidden0", int(x.shape[1]))))
    logits = bnn.dense("output", h, classes - 1, layer("output", width))
    first = (ops.ones_like if exchanged else ops.zeros_like)(logits[:, :1])
    f = ops.concatenate([first, logits])
    bnn.observe(y, f, likelihoods.Categorical())
