"""Classification of images by LeNet-5: two convolutions, each with a pooling, and three dense layers.

    weights ~ N(0, sigma^2 / fan-in)      biases ~ N(0, sigma^2)      fan-in of a convolution: k k times its channels
    a = pool(tanh(conv(image, 6 filters k x k)))        b = pool(tanh(conv(a, 16 filters k x k)))     means over 2 x 2
    f = dense(tanh(dense(tanh(dense(b, 120)), 84)), C)  P(y_n = c | x_n) = exp(f_nc) / sum_c' exp(f_nc')    c = 1..C

Images are surrounded by zeros so that a convolution keeps their size; LeNet-5 does so in its first one only.

Sizes: 21 386 numbers on its default data, 107 786 on images of 28 x 28 (MNIST).
Default data: digits (1797 images of 8 x 8 pixels, 10 classes), standardised. `mnist` is `--data mnist`.
Source: Y. LeCun, L. Bottou, Y. Bengio and P. Haffner, Gradient-based learning applied to document recognition (1998);
as a Bayesian network in E. Daxberger et al., Laplace Redux (2021), section 4.

What is hard about its posterior: its size. One full matrix over the weights takes 3.7 GB on digits and 93 GB on MNIST,
and Laplace needs several: it wants structure="kron" or "diag", or the last layer. NUTS needs all rows for each
gradient, mini-batches are the way (SVI, SGLD, SGHMC, SWAG, ensembles). A filter is used at every place of an image, so
that local reparameterisation, which takes its uses to be independent, is refused. Filters and units can be exchanged:
judge convergence by probabilities.
"""

from __future__ import annotations

from typing import Any

import ppl_bnn as bnn
from ppl_bnn import likelihoods, ops, priors

DATA = "digits"


def model(
    x: Any,
    y: Any = None,
    *,
    classes: int = 10,
    channels: tuple[int, ...] = (6, 16),
    widths: tuple[int, ...] = (120, 84),
    kernel: int = 5,
    activation: str = "tanh",
    sigma: float = 1.0,
) -> None:
    """`channels` filters, `widths` dense units and `classes` logits.

    x: (N, F), the pixels of an image row by row, or (N, height, width, channels). y: (N,), labels 0..classes-1.
    sigma: prior standard deviation of a weight, times sqrt(fan-in).
    """
    f = bnn.cnn(
        x,
        channels,
        [*widths, classes],
        kernel,
        activation,
        priors.Normal(0.0, "fan_in", sigma),
        pool=lambda h: ops.avg_pool(h, 2, padding="same"),
    )
    bnn.observe(y, f, likelihoods.Categorical())
