"""Classification of images by a transformer: patches of pixels are positions that read each other.

    h_t = patch_t E + e + p_t       t = 1..T patches       p_t ~ N(0, 1)      K = width channels
    h <- h + A(LN(h))             A: each head reads softmax over s of q_t . k_s / sqrt(K / heads), side by side, mapped
    h <- h + gelu(LN(h) W1 + b1) W2 + b2                 4 K hidden units        both lines once for each block
    f_n = mean over t of LN(h_nt) V + d         P(y_n = c | x_n) = exp(f_nc) / sum_c' exp(f_nc')         c = 1..C

Maps ~ N(0, sigma^2 / fan-in), their biases ~ N(0, sigma^2). LN takes mean and standard deviation of a position to 0 and
1, then gain ~ N(1, 1/16) and bias ~ N(0, 1).

Sizes: P K + T K + K (12 K + 13) blocks + 3 K + (K + 1) C numbers, P pixels in a patch (718 on its default data).
Default data: digits (1797 images of 8 x 8 pixels, 10 classes), standardised: 16 patches of 2 x 2 pixels.
Source: A. Vaswani et al., Attention is all you need (2017); R. Xiong et al., On layer normalization in the transformer
architecture (2020), for LN in front; patches are A. Dosovitskiy et al., An image is worth 16 x 16 words (2021).

What is hard about its posterior: queries and keys matter as a product only, and so do values and the map after them:
any invertible matrix between the two of a head changes nothing but the prior, a whole manifold where a network of tanh
units has isolated copies. A bias of the keys changes nothing at all. At a position where all images look alike p_t acts
much as a bias does and is known together with d only. Samplers see curved valleys, Gaussians around a mode one place on
the manifold: judge by probabilities. Weights are used at every position, so local reparameterisation is refused.
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
    width: int = 6,
    heads: int = 2,
    blocks: int = 1,
    patch: int = 2,
    sigma: float = 1.0,
) -> None:
    """`blocks` of attention with `heads` over patches of `patch` x `patch` pixels, and `classes` logits.

    x: (N, F), the pixels of an image row by row, or (N, height, width, channels). y: (N,), labels 0..classes-1. width:
    a multiple of `heads`. sigma: prior standard deviation of a weight of a map, times sqrt(fan-in).
    """
    prior = priors.Normal(0.0, "fan_in", sigma)
    f = bnn.transformer(x, classes, width, heads, blocks, prior=prior, patch=patch)
    bnn.observe(y, f, likelihoods.Categorical())
