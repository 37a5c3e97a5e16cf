"""Classification of images by a small residual network, normalised without reference to other rows.

    w ~ N(0, sigma^2 / fan-in), fan-in of a convolution: k k times its channels       the bias of dense ~ N(0, sigma^2)
    FRN(x) = x / sqrt(mean of x^2 over places + 10^-6) * gain + bias        gain ~ N(1, 1/16)      bias ~ N(0, 1)
    a(x) = max(x, t)                                                        t ~ N(0, 1/16)
    h_0 = a(FRN(conv(image)))     h_(l+1) = a(FRN(conv(a(FRN(conv(h_l))))) + S(h_l))      a block for each of `channels`
    f = dense(mean of h over places)        P(y_n = c | x_n) = exp(f_nc) / sum_c' exp(f_nc')        c = 1..C

S is the identity or, where a block has a stride of 2 or other channels, a convolution 1 x 1. Convolutions have no bias;
gains, biases and thresholds t are one for each channel. Batch normalisation would tie the rows of a batch together, and
there would be no distribution of a row given the weights: filter response normalisation looks at one row.

Sizes: 826 numbers on its default data. He's network of 6 b + 2 layers is channels=(16, 32, 64), blocks=b.
Default data: digits (1797 images of 8 x 8 pixels, 10 classes), standardised. `mnist` is `--data mnist`.
Source: K. He, X. Zhang, S. Ren and J. Sun, Deep residual learning for image recognition (2016); S. Singh and S.
Krishnan, Filter response normalization layer (2020); as a Bayesian network P. Izmailov et al., What are Bayesian neural
network posteriors really like (2021).

What is hard about its posterior: what leaves a normalisation does not change when the weights in front of it are
multiplied, so their size is known from the prior alone, a direction for each channel in which nothing is learned and
steps of any size are too small or too large. Channels of a block can be exchanged, and what two blocks share along the
way around them must be exchanged alike. Weights are used at all places, so local reparameterisation is refused. Judge
convergence by probabilities. Large ones want mini-batches (SVI, SGLD, SGHMC, SWAG, ensembles) and structure="kron".
"""

from __future__ import annotations

from typing import Any

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors

DATA = "digits"


def model(
    x: Any,
    y: Any = None,
    *,
    classes: int = 10,
    channels: tuple[int, ...] = (3, 6),
    blocks: int = 1,
    kernel: int = 3,
    activation: str | None = None,
    sigma: float = 1.0,
) -> None:
    """`blocks` residual blocks for each of `channels`, the first of a later stage with stride 2, and `classes` logits.

    x: (N, F), the pixels of an image row by row, or (N, height, width, channels). y: (N,), labels 0..classes-1.
    activation: None for the thresholds t, or a name. sigma: prior standard deviation of a weight, times sqrt(fan-in).
    """
    prior = priors.Normal(0.0, "fan_in", sigma)
    f = bnn.resnet(x, channels, classes, blocks, kernel, activation, prior)
    bnn.observe(y, f, likelihoods.Categorical())
