"""Simulated tables. Each function returns x and y, with NumPy's legacy generator, whose numbers are the same in every
version.
"""

from __future__ import annotations

import numpy as np


def survival_simulated() -> tuple[np.ndarray, np.ndarray]:
    """Censored event times under proportional hazards: x (300, 5) and y (300, 2).

        x_j ~ N(0, 1),     g(x) = 0.8 x_1 - 0.6 x_2 + 0.5 (x_3^2 - 1),     hazard h(t | x) = 0.05 1.5 t^0.5 exp(g(x)),
        T = (-log U / (0.05 exp(g(x))))^(1 / 1.5),    U uniform on (0, 1),    C exponential with mean 20, in years;
        y = (min(T, C), 1 if T <= C else 0).

    T has a Weibull distribution of shape 1.5, by inversion. x_4 and x_5 have no effect, and x_3 has no linear effect. C
    is independent of T given x.

    References
    ----------
    R. Bender, T. Augustin and M. Blettner, Generating survival times to simulate Cox proportional hazards models,
    Statistics in Medicine 24, 2005.
    """
    rng = np.random.RandomState(2005)
    x = rng.normal(size=(300, 5))
    risk = 0.8 * x[:, 0] - 0.6 * x[:, 1] + 0.5 * (x[:, 2] ** 2 - 1.0)
    time = (-np.log(rng.uniform(size=300)) / (0.05 * np.exp(risk))) ** (1.0 / 1.5)
    censored = rng.exponential(20.0, size=300)
    return x, np.column_stack([np.minimum(time, censored), time <= censored])


def inverse_sine() -> tuple[np.ndarray, np.ndarray]:
    """The inverse of a function, so that one input has several outputs: x (300, 1) and y (300,).

        y uniform on (0, 1),     x = y + 0.3 sin(2 pi y) + e,     e uniform on (-0.1, 0.1).

    References
    ----------
    C. M. Bishop, Mixture density networks (1994).
    """
    rng = np.random.RandomState(1994)
    y = rng.uniform(size=300)
    x = y + 0.3 * np.sin(2.0 * np.pi * y) + rng.uniform(-0.1, 0.1, size=300)
    return x[:, None], y


def counts_simulated() -> tuple[np.ndarray, np.ndarray]:
    """Overdispersed counts about a smooth rate: x (300, 3) and y (300,).

        x_j uniform on (-2, 2),     m(x) = exp(1.2 + sin(2 x_1) + 0.5 x_2),     y ~ Poisson(m(x) G),

    G of a Gamma distribution with shape 3 and mean 1: y is negative binomial with mean m and variance m + m^2 / 3. x_3
    has no effect.
    """
    rng = np.random.RandomState(1949)
    x = rng.uniform(-2.0, 2.0, size=(300, 3))
    mean = np.exp(1.2 + np.sin(2.0 * x[:, 0]) + 0.5 * x[:, 1])
    return x, rng.poisson(mean * rng.gamma(3.0, 1.0 / 3.0, size=300)).astype(np.float64)


def mackey_glass() -> tuple[np.ndarray, np.ndarray]:
    """The next value of a chaotic series, y (400,), from its last eight values, x (400, 8), oldest first, in time.

        dz/dt = 0.2 z(t - 17) / (1 + z(t - 17)^10) - 0.1 z(t),     z(t) = 1.2 for t <= 0,

    by the Runge-Kutta rule of order 4 with steps of 0.1, measured at t = 600, 606, 612, ... with errors ~ N(0, 0.05^2).
    Rows overlap: the neighbours of a test row in a random split contain its target, so `Table.split` splits in time.

    References
    ----------
    M. C. Mackey and L. Glass, Oscillation and chaos in physiological control systems, Science 197 (1977).
    """
    z = mackey_glass_series(600.0 + 6.0 * np.arange(408))
    measured = z + 0.05 * np.random.RandomState(1977).normal(size=len(z))
    windows = np.lib.stride_tricks.sliding_window_view(measured, 9)
    return windows[:, :8].copy(), windows[:, 8].copy()


def mackey_glass_series(times: np.ndarray) -> np.ndarray:
    """z at `times`, multiples of 0.1, starting at 0."""
    step, delay = 0.1, 170

    def growth(past: float) -> float:
        # Products are the same on every machine, powers are not, and chaos amplifies the difference.
        square = past * past
        fourth = square * square
        return 0.2 * past / (1.0 + fourth * fourth * square)

    last = round(float(times[-1]) / step)
    # z[k] is the value at (k - delay) steps, between[k] the value half a step later, by Hermite's cubic.
    z, between = [1.2] * (delay + 1), [1.2] * delay
    for k in range(last):
        first, second, third = growth(z[k]), growth(between[k]), growth(z[k + 1])
        now = z[-1]
        slope = first - 0.1 * now
        slope2 = second - 0.1 * (now + 0.5 * step * slope)
        slope3 = second - 0.1 * (now + 0.5 * step * slope2)
        slope4 = third - 0.1 * (now + step * slope3)
        after = now + step * (slope + 2.0 * slope2 + 2.0 * slope3 + slope4) / 6.0
        between.append(0.5 * (now + after) + 0.125 * step * (slope - (third - 0.1 * after)))
        z.append(after)
    return np.array(z)[delay + np.round(times / step).astype(int)]


_TABLES = (survival_simulated, inverse_sine, counts_simulated, mackey_glass)
SIMULATED = {table.__name__: table for table in _TABLES}
