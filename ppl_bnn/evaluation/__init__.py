"""Methods side by side: comparisons, grids, advice."""
