"""Posteriors: draws, export, convergence, storage."""
