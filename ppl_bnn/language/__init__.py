"""The modelling language. It imports no framework.

A model is a plain function `(x, y=None, *, ...)`, without a base class, a decorator or a registry. It can be tested,
bound with `functools.partial`, and passed to the tools of either system by `as_numpyro` and `as_pyro`.
"""
