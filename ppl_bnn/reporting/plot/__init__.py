"""Plots of posteriors, predictions and comparisons on Matplotlib axes, drawn by the code of the report's pictures.

Every function takes `ax=` and returns the axes that it drew on. Without `ax` they belong to a figure of their own,
which a notebook shows when the call ends a cell; `ax.figure.savefig("plot.png")` writes it. For a window, or several
plots in one figure, make the axes by pyplot: ``figure, (left, right) = plt.subplots(1, 2)``, then ``ax=left``.

A fit that has not converged is named in the picture. What is not defined, such as the trace of independent draws, is
refused.
"""

from ppl_bnn.reporting.plot.fits import loss, predictive, prior_predictive, ranks, trace
from ppl_bnn.reporting.plot.results import calibration, compare, gap, pit, reliability

__all__ = [
    "calibration",
    "compare",
    "gap",
    "loss",
    "pit",
    "predictive",
    "prior_predictive",
    "ranks",
    "reliability",
    "trace",
]
