"""Curvature of the posterior, and Gaussians made from it."""
