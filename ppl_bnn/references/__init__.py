"""Certified reference posteriors, and grades of any approximation against them.

A reference has draws of a network's outputs on a frozen grid of inputs, made by samplers whose convergence is recorded
in its certificate. Loading a reference and grading predictions need NumPy only.
"""

from ppl_bnn.references.grade import Grade
from ppl_bnn.references.library import Entry, entries, load, record
from ppl_bnn.references.reference import Reference

__all__ = ["Entry", "Grade", "Reference", "entries", "load", "record"]
