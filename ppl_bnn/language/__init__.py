"""The modelling language. It imports no framework.

A model is a plain function `(x, y=None, *, ...)`: it has no base class, no decorator and no registry. It can be read,
tested, bound with `functools.partial`, and passed to any tool of either system by `as_numpyro` and `as_pyro`.
"""
