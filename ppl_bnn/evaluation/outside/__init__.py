"""Estimators from outside the library in comparisons and grids."""
