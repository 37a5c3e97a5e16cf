"""Comparison of methods: comparisons, grids and advice."""
