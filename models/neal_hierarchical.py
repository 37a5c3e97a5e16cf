"""Classification by a network whose groups of weights have precisions of their own, drawn from a Gamma prior.

    t_g ~ Gamma(degrees / 2, rate degrees scale^2 / 2), g = 1, 2, 3: input weights, hidden biases, output weights
    W1_jk ~ N(0, 1 / (F t_1))      b1_k ~ N(0, 1 / t_2)      h_n = tanh(x_n W1 + b1)         H = width hidden units
    W2_kc ~ N(0, 1 / (H t_3))      b2_c ~ N(0, 1)            f_n = h_n W2 + b2               c = 1..C
    P(y_n = c | x_n) = exp(f_nc) / sum_c' exp(f_nc')

Sizes: (F + C + 1) H + C + 3 numbers (176 on its default data).
Default data: wine (178 rows, 13 features, 3 classes), standardised.
Source: R. M. Neal, Bayesian Learning for Neural Networks (1996), chapters 1 and 3. The mean of t_g is
1 / scale^2; his own `degrees`, a half or so, are vaguer than the 4 here. A weight has the variance 1 / (fan-in t_g), so
what a group adds to a unit has 1 / t_g whatever the fan-in (for inputs of size 1), and the prior over f has a limit as
H grows.

What is hard about its posterior: how large the weights are is learned from as many of them as the group holds. Centred,
weights and scale make a funnel, and the joint density has a spike at zero weights that MAP falls into; here the
latent variables are t_g and weights in units of their scale. What stays is the ridge between t_1 and t_3 (small
input weights, large output weights and nearly the same function) and, classes being separable, a long tail
towards large weights, longer than under fixed scales because t_g gives way.
"""

from __future__ import annotations

from typing import Any

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, ops, priors

DATA = "wine"


def model(
    x: Any, y: Any = None, *, classes: int = 3, width: int = 10, degrees: float = 4.0, scale: float = 1.0
) -> None:
    """One hidden layer of `width` tanh units and `classes` logits; three groups of weights learn their size.

    x: (N, F). y: (N,), labels 0..classes-1. degrees: the smaller, the vaguer the prior of a precision. scale: what
    standard deviation a group is expected to have, times sqrt(fan-in).
    """

    def group(name: str, shape: tuple[int, ...], fan_in: int) -> Any:
        precision = bnn.sample(f"{name}.precision", dist.Gamma(0.5 * degrees, 0.5 * degrees * scale**2))
        base = bnn.sample(f"{name}.base", dist.Normal(0.0, 1.0).expand(shape).to_event())
        return bnn.deterministic(name, base / ops.sqrt(fan_in * precision))

    f = bnn.mlp(x, [width, classes], "tanh", group, bias=[True, priors.Normal()])
    bnn.observe(y, f, likelihoods.Categorical())
