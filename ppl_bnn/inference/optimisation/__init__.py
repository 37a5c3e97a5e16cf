"""Modes of the posterior, and the optimisers that find them."""
